// The steps of this program are in ../script.py.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	first    = 50
	second   = 5
	patience = 60 * time.Second
)

type report struct {
	Version   string      `json:"version"`
	Confirmed int         `json:"confirmed"`
	Received  [][2]string `json:"received"`
	Blocked   []bool      `json:"blocked"`
	Flow      []bool      `json:"flow"`
	Request   string      `json:"request"`
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}

type program struct {
	report     report
	publishing *amqp.Channel
	other      *amqp.Channel
	blocked    chan amqp.Blocking
	flow       chan bool
}

func (p *program) publish(start, stop int) {
	for number := start; number < stop; number++ {
		confirmation, err := p.publishing.PublishWithDeferredConfirmWithContext(
			context.Background(), "", "orders", true, false,
			amqp.Publishing{Body: []byte(fmt.Sprintf("%06d", number)), MessageId: fmt.Sprint(number)},
		)
		check(err)
		if !confirmation.Wait() {
			log.Panicf("%d was nacked", number)
		}
		p.report.Confirmed++
	}
}

func (p *program) consume(count int) {
	deliveries, err := p.other.Consume("orders", "consumer", false, false, false, false, nil)
	check(err)
	for ; count > 0; count-- {
		delivery := <-deliveries
		p.report.Received = append(p.report.Received, [2]string{string(delivery.Body), delivery.MessageId})
		check(delivery.Ack(false))
	}
	check(p.other.Cancel("consumer", false))
}

func (p *program) tell(words string) {
	check(p.other.PublishWithContext(
		context.Background(), "", "told", false, false, amqp.Publishing{Body: []byte(words)},
	))
}

func (p *program) awaitGo() {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		_, ok, err := p.other.Get("go", true)
		check(err)
		if ok {
			return
		}
	}
	log.Panic("nobody said to go on")
}

// look adds the notifications of the library to the report. The library sends them before it delivers later frames.
func (p *program) look() {
	for {
		select {
		case blocking := <-p.blocked:
			p.report.Blocked = append(p.report.Blocked, blocking.Active)
		case active := <-p.flow:
			p.report.Flow = append(p.report.Flow, active)
		default:
			return
		}
	}
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, module := range info.Deps {
			if module.Path == "github.com/rabbitmq/amqp091-go" {
				return module.Version
			}
		}
	}
	return "unknown"
}

func main() {
	connection, err := amqp.Dial(os.Args[1])
	check(err)
	p := program{report: report{Version: version()}}
	p.publishing, err = connection.Channel()
	check(err)
	p.other, err = connection.Channel()
	check(err)
	p.blocked = connection.NotifyBlocked(make(chan amqp.Blocking, 10))
	p.flow = p.publishing.NotifyFlow(make(chan bool, 10))
	check(p.publishing.Confirm(false))
	_, err = p.publishing.QueueDeclare("orders", false, false, false, false, nil)
	check(err)

	p.publish(0, first)
	p.consume(first)
	for _, words := range []string{"published", "blocked", "unblocked"} {
		p.tell(words)
		p.awaitGo()
	}
	p.publish(first, first+second)
	p.tell("went on")
	p.awaitGo()
	p.consume(second)
	p.look()
	_, err = p.publishing.QueueDeclarePassive("orders", false, false, false, false, nil)
	p.report.Request = "ok"
	if err != nil {
		p.report.Request = fmt.Sprintf("%T", err)
	}
	check(connection.Close())
	check(json.NewEncoder(os.Stdout).Encode(p.report))
}
