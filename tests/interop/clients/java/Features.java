import com.rabbitmq.client.AMQP.BasicProperties;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.LongString;
import com.rabbitmq.client.SaslMechanism;
import com.rabbitmq.client.impl.LongStringHelper;
import com.rabbitmq.client.impl.ValueWriter;
import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** Uses features of a broker that other clients of this folder do not use, and prints the results as JSON. */
public final class Features {
  private static final int MESSAGES = 99;
  private static final int CONSUMERS = 3;
  private static final int PREFETCH = 10;
  private static final int DEATHS = 3;
  private static final long PATIENCE = 60_000;

  private final Connection connection;
  private final Channel channel;

  private Features(String url) throws Exception {
    ConnectionFactory factory = new ConnectionFactory();
    factory.setUri(url);
    factory.setAutomaticRecoveryEnabled(false);
    factory.setSaslConfig(mechanisms -> List.of(mechanisms).contains("AMQPLAIN") ? new AmqPlain() : null);
    connection = factory.newConnection();
    channel = connection.createChannel();
    channel.confirmSelect();
  }

  /** The mechanism AMQPLAIN, because the library has only PLAIN and EXTERNAL. */
  private static final class AmqPlain implements SaslMechanism {
    @Override
    public String getName() {
      return "AMQPLAIN";
    }

    @Override
    public LongString handleChallenge(LongString challenge, String user, String password) {
      ByteArrayOutputStream table = new ByteArrayOutputStream();
      ValueWriter writer = new ValueWriter(new DataOutputStream(table));
      try {
        writer.writeTable(Map.of("LOGIN", user, "PASSWORD", password));
        writer.flush();
      } catch (IOException error) {
        throw new IllegalStateException(error);
      }
      // The response is the table without its length.
      byte[] all = table.toByteArray();
      return LongStringHelper.asLongString(java.util.Arrays.copyOfRange(all, 4, all.length));
    }
  }

  private void publish(String queue, String body, BasicProperties properties) throws Exception {
    channel.basicPublish("", queue, true, properties, body.getBytes(StandardCharsets.UTF_8));
    channel.waitForConfirmsOrDie(PATIENCE);
  }

  private static <T> T next(BlockingQueue<T> messages) throws InterruptedException {
    T message = messages.poll(PATIENCE, TimeUnit.MILLISECONDS);
    if (message == null) {
      throw new IllegalStateException("a message did not come");
    }
    return message;
  }

  /** Returns the number of messages of each consumer. All share a prefetch count, and ack each message at once. */
  private String shares() throws Exception {
    String queue = channel.queueDeclare().getQueue();
    for (int number = 0; number < MESSAGES; number++) {
      channel.basicPublish("", queue, true, null, new byte[0]);
    }
    channel.waitForConfirmsOrDie(PATIENCE);
    // Otherwise the first consumer could get all messages before the others exist.
    CountDownLatch subscribed = new CountDownLatch(1);
    Channel shared = connection.createChannel();
    shared.basicQos(PREFETCH, true);
    int[] counts = new int[CONSUMERS];
    BlockingQueue<Integer> received = new LinkedBlockingQueue<>();
    for (int at = 0; at < CONSUMERS; at++) {
      int consumer = at;
      shared.basicConsume(queue, false, (tag, message) -> {
        awaitLatch(subscribed);
        // Ack before adding to the queue, because the channel is closed after the last message.
        shared.basicAck(message.getEnvelope().getDeliveryTag(), false);
        received.add(consumer);
      }, tag -> { });
    }
    subscribed.countDown();
    for (int number = 0; number < MESSAGES; number++) {
      counts[next(received)]++;
    }
    shared.close();
    return String.format("[%d, %d, %d]", counts[0], counts[1], counts[2]);
  }

  private static void awaitLatch(CountDownLatch latch) {
    try {
      latch.await();
    } catch (InterruptedException error) {
      throw new IllegalStateException(error);
    }
  }

  /** Sends a request, and returns its answer by direct reply-to. */
  private String answer() throws Exception {
    String requests = channel.queueDeclare().getQueue();
    Channel client = connection.createChannel();
    BlockingQueue<String> answers = new LinkedBlockingQueue<>();
    client.basicConsume("amq.rabbitmq.reply-to", true, (tag, message) ->
        answers.add(message.getProperties().getCorrelationId() + " "
            + new String(message.getBody(), StandardCharsets.UTF_8)), tag -> { });
    BasicProperties asks =
        new BasicProperties.Builder().replyTo("amq.rabbitmq.reply-to").correlationId("7").build();
    client.basicPublish("", requests, asks, "6 times 7".getBytes(StandardCharsets.UTF_8));
    GetResponse request = null;
    long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(PATIENCE);
    while (request == null && System.nanoTime() < end) {
      request = channel.basicGet(requests, true);
    }
    if (request == null) {
      throw new IllegalStateException("the request did not come");
    }
    BasicProperties replies =
        new BasicProperties.Builder().correlationId(request.getProps().getCorrelationId()).build();
    channel.basicPublish("", request.getProps().getReplyTo(), replies, "42".getBytes(StandardCharsets.UTF_8));
    String answer = next(answers);
    client.close();
    return answer;
  }

  /** Rejects a message several times, and returns its entry in x-death and the class of the entry's count. */
  private String deaths() throws Exception {
    String name = "deaths-" + UUID.randomUUID();
    channel.queueDeclare(name, false, true, true,
        Map.of("x-dead-letter-exchange", "", "x-dead-letter-routing-key", name));
    publish(name, "rejected", null);
    for (int number = 0; number < DEATHS; number++) {
      channel.basicReject(get(name).getEnvelope().getDeliveryTag(), false);
    }
    List<?> deaths = (List<?>) get(name).getProps().getHeaders().get("x-death");
    Map<?, ?> death = (Map<?, ?>) deaths.get(0);
    return String.format("{\"entries\": %d, \"reason\": \"%s\", \"count\": %s, \"class\": \"%s\"}",
        deaths.size(), death.get("reason"), death.get("count"), death.get("count").getClass().getSimpleName());
  }

  private GetResponse get(String queue) throws Exception {
    long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(PATIENCE);
    while (System.nanoTime() < end) {
      GetResponse message = channel.basicGet(queue, false);
      if (message != null) {
        return message;
      }
    }
    throw new IllegalStateException("a message did not come");
  }

  public static void main(String[] arguments) throws Exception {
    try {
      Features features = new Features(arguments[0]);
      System.out.println(String.format("{\"shares\": %s, \"answer\": \"%s\", \"death\": %s}",
          features.shares(), features.answer(), features.deaths()));
      features.connection.close();
    } catch (Exception error) {
      error.printStackTrace();
      System.exit(1);
    }
    System.exit(0);
  }
}
